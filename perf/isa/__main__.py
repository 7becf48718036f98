import sys

from perf.isa import main

sys.exit(main())
