"""The actor's side: exploration, fragments, outbox, sender and the rollout loop."""
