# Two commands for newcomers; each is a script in ops/ and needs no make.
.PHONY: demo test check

demo:  ## Set up, train the hand of configs/hand_reach.yaml, say where the pictures are.
	ops/demo

test:  ## Set up; style, types, layers; the tests.
	ops/setup
	ops/setup-rendering
	ops/setup-tls
	ops/check
	ops/test

check:  ## Lint, types, layers.
	ops/setup
	ops/check
