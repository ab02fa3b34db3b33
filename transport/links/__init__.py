"""Lines to other processes: who greets, who says what, who notices a loss."""
