# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the interfaces by which real arms are moved: one per file, with the real one's rules and their source.

They turn commands into joint references, 100 times per simulated second, which `commanded_arm.JointServo` turns into
torques.
"""
