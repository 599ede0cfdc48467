"""`python -m cluster_sft` is the command `cluster-sft`."""

import sys

from cluster_sft.cli import main

sys.exit(main())
