import sys

from hybrid.perf.isa import main

if __name__ == "__main__":
    sys.exit(main())
