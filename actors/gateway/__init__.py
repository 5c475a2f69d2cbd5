"""The one address that rollouts speak to: it hides refits, engine failures and versions behind one slow answer."""
