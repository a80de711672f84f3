"""What failures cost over days and weeks: traces of a fleet, policies that live with them, and their comparison."""
