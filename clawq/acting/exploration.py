"""Exploration: what a policy explores with, and what is done before there is one.

Each env of an actor has its own noise size, evenly spread from the least to the most (Li et al. 2023, "Parallel
Q-Learning", §3.2: mixed exploration): some envs exploit, some explore, and nobody has to tune one number. While the
learner has not trained yet, actions are uniform; later a share of them may be (Andrychowicz et al. 2017,
            return action
        chance = self._generator.random((2, self._shape[0], 1))
        goes_on = self._holds & (chance[0] >= self._ends)
        begins = ~goes_on & (chance[1] < self._begins)
        self._held = np.where(begins, self.uniform(), self._held)
        self._holds = goes_on | begins
        return np.where(self._holds, self._held, action)


__all__ = ["NoiseLadder"]
