"""Process concerns: limits, pausing, signals, exit codes, threads, logging."""
