"""The command line: one file per group of commands; daemons are named by `module:function` and imported when run."""
