"""The Lightning door: callbacks for both names of the Trainer."""
