import sys

from hybrid.perf.record import main

sys.exit(main())
