import sys

from perf.roofline import main

sys.exit(main())
