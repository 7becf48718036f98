import sys

from hybrid.generate import main

sys.exit(main())
