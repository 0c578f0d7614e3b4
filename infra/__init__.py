"""The plumbing: log, object store, weights, settings, command line, daemons' shell, embedded servers, audit, demo."""
