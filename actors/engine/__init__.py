"""The inference engines: a sidecar that supervises one server, guards its port and loads its weights."""
