"""What trajectories are stored in: HDF5, LeRobot and zarr, all read as ``stored.Container``."""
