"""The command line: options, texts, progress bars and exit codes around `qsub.streaming`."""
