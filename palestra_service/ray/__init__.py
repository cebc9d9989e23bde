"""The only package that depends on Ray: a cluster, model servers as actors, and their control plane."""
