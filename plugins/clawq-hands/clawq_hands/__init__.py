"""Gymnasium environments for clawq: Gymnasium-Robotics hands and arms, Adroit, and the MuJoCo basics."""
