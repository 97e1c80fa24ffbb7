"""Problems a second that workers make and verify, and how long draws take while a generator hangs."""
