"""What every test runs under."""

import signal

# A shell starts what runs in the background with SIGINT ignored, and processes inherit that;
# interruptions are tested there as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
