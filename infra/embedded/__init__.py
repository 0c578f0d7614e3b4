"""A real broker and a real object store on this machine, started by `offsetrl up`; no Docker, no root."""
