import sys

from hybrid.perf.profile import main

sys.exit(main())
