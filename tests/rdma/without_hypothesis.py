"""For `-p` of pytest in the VM, where no test uses hypothesis: pytest-trio would import it, for half a minute."""

import sys

sys.modules["hypothesis"] = None  # type: ignore[assignment]  # what makes imports of it fail
