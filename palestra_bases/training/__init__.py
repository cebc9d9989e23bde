"""One trainer for the adapters of many tenants: pieces, common passes, slots, and the queue before them."""
