"""What only JupyterLab needs: predictions to play with (explore, panel) and the progress of a run by hand (live)."""
