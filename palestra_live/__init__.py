"""Live: sessions of an application are served, recorded with consent, and trained by feedback (`kind = "live"`)."""
