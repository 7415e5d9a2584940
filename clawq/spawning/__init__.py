"""Child processes that are exec'ed, bounded in time and log size, and ended with everything they started."""
