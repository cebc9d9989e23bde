"""Other processes of Palestra: one way to start and end them, to talk to them, and to call what they implement."""
