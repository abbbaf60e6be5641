"""What a run will need, from arithmetic over the architecture, the layouts and the settings. No torch at import."""
