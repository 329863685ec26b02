"""Reference answers that rest on no near tie: when two answers are the same (`margins.py`), and the questions whose
answers the bundled model is sure of (`questions.py`), measured in float32 (`float32.py`)."""
