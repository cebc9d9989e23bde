"""Jobs of the control plane: the scheduler that starts and watches them, and the launcher that it asks to."""
