import sys

from perf.ablate import main

sys.exit(main())
