"""Weights on their way from a trainer to the workers: whole or not at all, checked before anybody loads them.

| file | duty |
|---|---|
| `header.py` | the header of a safetensors file, read without trusting it |
| `manifest.py` | the list of a version's files and tensors with their digests |
| `publish.py` | blobs, then the manifest, then the announcement |
| `announce.py` | the `weights` topic: which version is the newest valid one |
| `fetch.py` | a version into a local folder, verified |
| `adapter.py` | an adapter merged into its base, before an engine sees it |
| `follower.py` | a thread that always has the newest version ready |
| `mirror.py` | daemon: one region's bucket to another's |
"""
