import sys

from perf.targets import main

sys.exit(main())
