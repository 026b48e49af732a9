"""Winners of tuning that come with the package, one JSON file per device name or architecture."""
