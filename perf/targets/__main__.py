import sys

from hybrid.perf.targets import main

if __name__ == "__main__":
    sys.exit(main())
