"""For every test, and for the processes that tests start."""

import os

# No test asks a model hub on the network. Set before huggingface_hub is imported, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
