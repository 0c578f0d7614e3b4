"""What engines are built from; the engines themselves are in `producers.engines`."""
