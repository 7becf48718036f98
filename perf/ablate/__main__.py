import sys

from hybrid.perf.ablate import main

if __name__ == "__main__":
    sys.exit(main())
