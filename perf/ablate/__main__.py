import sys

from hybrid.perf.ablate import main

sys.exit(main())
