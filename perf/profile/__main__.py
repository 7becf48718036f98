import sys

from hybrid.perf.profile import main

if __name__ == "__main__":
    sys.exit(main())
