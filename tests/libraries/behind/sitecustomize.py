"""Put the optional libraries behind all other packages, in every process that a test starts."""

import os
import sys

sys.path.append(os.environ["PALESTRA_TEST_LIBRARIES"])
