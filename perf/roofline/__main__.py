import sys

from hybrid.perf.roofline import main

sys.exit(main())
