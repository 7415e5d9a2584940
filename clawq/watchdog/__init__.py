"""The watchdog of a host: looks at the processes that clawq registered, decides purely, acts carefully."""
