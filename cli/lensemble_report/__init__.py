"""``lensemblectl report``: what a federation has done, as one HTML file from its own records."""
