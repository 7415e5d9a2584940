"""Faults done to a real system on purpose, each with what is to become of it (`ops/chaos`, tests/faults).

system    the running system: learner and workers on it; what it has done, what it leaves behind
fault     what a fault is, and the verdict on one: recovery, ledger, leftovers, one JSON line
catalog   all faults by their names F1–F20
"""
