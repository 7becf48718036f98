import sys

from hybrid.perf.isa import main

sys.exit(main())
