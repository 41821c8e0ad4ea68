"""Compare later forwards with the recorded one."""
