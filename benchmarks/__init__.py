"""Figures, side by side with what is possible at all: each module prints one JSON object per figure."""
