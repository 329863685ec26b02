import sys
from pathlib import Path

# The samples that several of these modules build on lie beside them.
sys.path.insert(0, str(Path(__file__).parent))
