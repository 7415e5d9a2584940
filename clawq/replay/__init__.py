"""The learner's side of experience: what was read, what is kept, what is sampled."""
