"""What lives while a model trains: shards, the parameters users see, and ranks' agreement."""
